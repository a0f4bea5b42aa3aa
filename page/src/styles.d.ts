// Style sheets are imported for the bundler to gather.
declare module "*.css";
